"""The operator console: Streamlit pages over the gateway's and the planner's APIs. Holds no state.

Read in this order: app, sign_in, gateway_api, live, views/overview_page, charts/cluster_map, views/placements_page,
views/planner_page.
"""
