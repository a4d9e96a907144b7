"""What operators edit: classes, tenants, and the admission mode."""
