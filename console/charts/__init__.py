"""Charts and drawings: pure functions from data to Vega-Lite or SVG, and how they get onto a page."""
