"""Forms with which an operator changes something: classes, admission, plans."""
