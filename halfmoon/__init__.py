"""What Halfmoon's services share. Each room (sub-package) opens with the one sentence that says what belongs in it."""

__version__ = "0.1.0"
