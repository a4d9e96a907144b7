"""The admission card: how requests that would miss their targets are treated, and the history of that mode."""

from __future__ import annotations

import streamlit as st

from console.forms.class_form import done
from console.forms.mode_card import OWN, ModeChoice, draw_mode
from console.gateway_api import GatewayApi, GatewayError
from console.plain_text import plain

_MEANINGS = {
    "off": "Requests are never refused for a target; they wait.",
    "load": "A request that would miss a target under the present load is refused at once.",
    "predicted": "A request that would miss a target under the load at the end of its prefill is refused at once.",
    OWN: "Each gateway uses its own option (`--admission`).",
}


def draw_admission(api: GatewayApi) -> None:
    """Draws the card; an edit applies from the next request on."""
    try:
        admission = api.admission()
    except GatewayError as error:
        st.error(plain(str(error)), icon=":material/cloud_off:")
        return
    draw_mode(ModeChoice("Admission", "admission", _MEANINGS, api.put_admission, done), admission)
