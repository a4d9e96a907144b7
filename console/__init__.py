"""The operator console: Streamlit pages over the gateway's and the planner's APIs. Holds no state.

Read in this order: app, entrance, gateway_api, live, overview_page, cluster_map, placements_page, planner_page.
"""
