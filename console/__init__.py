"""Streamlit pages over the gateway's control API; holds no state."""
