"""The search for a layout: bounds, phases alone, estimates, and simulations of whole layouts."""
