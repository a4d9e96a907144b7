"""The console: `streamlit run console/app.py -- --gateway http://127.0.0.1:8000`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import streamlit as st

from console.gateway_api import GatewayApi
from console.planner_api import PlannerApi
from console.settings import api_key, gateway_ca, gateway_url, operator_token, planner_address
from console.sign_in import may_enter
from console.views import (
    autopilot_page,
    cache_page,
    overview_page,
    placements_page,
    planner_page,
    slo_page,
    tenants_page,
    try_page,
)
from halfmoon.rpc.credentials.sources import own_credential


class _Services(NamedTuple):
    gateway: GatewayApi
    planner: PlannerApi | None


class _Page(NamedTuple):
    render: Callable[[_Services], None]
    title: str
    icon: str
    path: str


PAGES = (
    _Page(lambda services: overview_page.render(services.gateway), "Overview", ":material/hub:", "overview"),
    _Page(
        lambda services: placements_page.render(services.gateway), "Placements", ":material/alt_route:", "placements"
    ),
    _Page(lambda services: cache_page.render(services.gateway), "Cache", ":material/layers:", "cache"),
    _Page(lambda services: slo_page.render(services.gateway), "SLO", ":material/speed:", "slo"),
    _Page(
        lambda services: planner_page.render(services.gateway, services.planner),
        "Planner",
        ":material/query_stats:",
        "planner",
    ),
    _Page(
        lambda services: autopilot_page.render(services.gateway), "Autopilot", ":material/flight_takeoff:", "autopilot"
    ),
    _Page(lambda services: tenants_page.render(services.gateway), "Tenants", ":material/key:", "tenants"),
    _Page(lambda services: try_page.render(services.gateway), "Try it", ":material/chat:", "try"),
)


def main() -> None:
    """Draws the chosen page; Streamlit runs this again at every interaction."""
    st.set_page_config(page_title="Halfmoon", page_icon="🌓", layout="wide")
    st.html(_STYLE)
    st.logo(_LOGO, size="large")
    try:
        services = _services(sys.argv[1:])
    except ValueError as err:
        st.error(str(err))
        return
    pages = [
        st.Page(
            partial(page.render, services), title=page.title, icon=page.icon, url_path=page.path, default=not number
        )
        for number, page in enumerate(PAGES)
    ]
    chosen = st.navigation(pages)  # before the entrance, so that a page's address leads to that page after it
    if not may_enter(st.get_option("server.address"), operator_token()):
        return
    st.sidebar.caption(f"Gateway  \n{services.gateway.url}")
    chosen.run()


def _services(arguments: Sequence[str]) -> _Services:
    """Clients of the services. Raises ValueError for unknown arguments."""
    token, planner = operator_token(), planner_address(arguments)
    gateway = GatewayApi(gateway_url(arguments), api_key(), token, gateway_ca())
    return _Services(gateway, None if planner is None else PlannerApi(planner, token, own_credential("operator")))


# Parts being refreshed stay visible until replaced, and pages begin further up. Columns that would be too narrow to be
# read go on the next line; Streamlit itself puts each on its own line below 640 px.
_STYLE = """<style>
[data-stale="true"] { opacity: 1 !important; transition: none !important; }
[data-testid="stExpander"] summary { color: inherit !important; }
[data-testid="stExpander"] details { border-color: color-mix(in srgb, currentColor 20%, transparent) !important; }
[data-testid="stMainBlockContainer"] { padding-top: 3.2rem; max-width: 1500px; }
@media (min-width: 641px) {
  [data-testid="stColumn"] { min-width: 6rem; }
  [data-testid="stColumn"]:has([data-testid="stMetric"]) { min-width: 7.5rem; }
  [data-testid="stColumn"]:has(.drawn, [data-testid="stVegaLiteChart"]) { min-width: 18rem; }
}
h1 { font-size: 2rem !important; }
</style>"""

_LOGO = """
<svg xmlns="http://www.w3.org/2000/svg" width="150" height="32" viewBox="0 0 150 32">
<circle cx="16" cy="16" r="12" fill="none" stroke="#8A8F98" stroke-width="1.5"/>
<path d="M16 4 A12 12 0 0 1 16 28 Z" fill="#0072B2"/>
<text x="38" y="22" font-family="sans-serif" font-size="18" font-weight="600" fill="#8A8F98">Halfmoon</text></svg>
"""

if __name__ == "__main__":
    main()
