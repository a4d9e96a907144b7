"""Previews of other targets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.values import AdmissionTargets
from services.gateway.control.target_preview import PastRequest, preview_targets


def past(predicted_s: float, *, refused: bool = False, ttft_s: float | None = 0.4) -> PastRequest:
    return PastRequest(refused, predicted_s, 0.01, None if refused else ttft_s, None if refused else 0.01)


def test_stricter_targets_refuse_more() -> None:
    requests = [past(0.3), past(0.8), past(2.0, refused=True)]
    found = preview_targets(requests, AdmissionTargets(1.0, None), AdmissionTargets(0.5, None))
    assert (found.num_requests, found.num_refused, found.num_would_be_refused) == (3, 1, 2)
    assert (found.num_served, found.num_meeting, found.num_newly_admitted) == (1, 1, 0)


def test_looser_targets_admit_what_they_explain_and_nothing_else() -> None:
    for_its_share = past(0.3, refused=True)  # the targets did not forbid it
    found = preview_targets(
        [past(2.0, refused=True), for_its_share], AdmissionTargets(1.0, None), AdmissionTargets(None, None)
    )
    assert (found.num_would_be_refused, found.num_newly_admitted) == (1, 1)


def test_of_a_lower_bound_only_a_refusal_is_sure() -> None:
    unread = past(2.0, refused=True)._replace(is_lower_bound=True)
    for allowed_s, counts in ((1.5, (1, 0, 0)), (3.0, (0, 0, 1))):
        found = preview_targets([unread], AdmissionTargets(1.0, None), AdmissionTargets(allowed_s, None))
        assert (found.num_would_be_refused, found.num_newly_admitted, found.num_undecided) == counts


def test_one_token_misses_no_tbt() -> None:
    one = PastRequest(False, 0.3, None, 0.3, None)
    found = preview_targets([one], AdmissionTargets(None, None), AdmissionTargets(1.0, 1e-6))
    assert (found.num_would_be_refused, found.num_meeting) == (0, 1)


@given(st.lists(st.builds(past, st.floats(0.01, 5), refused=st.booleans(), ttft_s=st.floats(0.01, 5))))
def test_the_same_targets_change_nothing(requests: list[PastRequest]) -> None:
    """Where what was refused is what they forbid, and the other way round."""
    targets = AdmissionTargets(1.0, 0.5)
    consistent = [one for one in requests if one.was_refused or one.predicted_ttft_s <= 1.0]
    found = preview_targets(consistent, targets, targets)
    assert found.num_would_be_refused == found.num_refused
    assert found.num_newly_admitted == 0
