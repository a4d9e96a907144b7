"""What commands share in the terminal: groups of options, tables, progress bars."""
