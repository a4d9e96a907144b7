"""Pages of the console. Not named `pages`: Streamlit would add a folder of that name to its navigation."""
