"""The command line of each service that `halfmoon up` starts."""
