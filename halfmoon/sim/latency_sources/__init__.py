"""Where step times come from: fitted coefficients, measured profiles, kernel tables and a roofline."""
