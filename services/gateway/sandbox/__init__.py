"""What may kill a process or never end, in processes that may die alone: checks of constraints, clients' templates."""
