"""Generated from proto/ by scripts/proto; never edited."""
