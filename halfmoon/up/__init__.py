"""`halfmoon up`: the whole system on one host. Which processes there are, how they start, change and stop."""
