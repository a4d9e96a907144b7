"""Enough workers for a rate: layouts get another one of the half that is late, until they hold it or nothing fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor

from halfmoon.plan.candidates import Candidate
from halfmoon.plan.goodput import Lateness, lateness_at
from halfmoon.plan.halves import Half
from halfmoon.plan.layout import WorkerKind, WorkerSet
from halfmoon.plan.question import Question
from halfmoon.plan.unit import layout_trial
from halfmoon.policy.cluster_view import Role
from halfmoon.sim.latency import LatencyModel

_MOST_GROWN = 10  # times that a layout gets more workers


def grown(
    question: Question,
    known: Mapping[WorkerKind, LatencyModel],
    halves: Mapping[Role, Sequence[Half]],
    chosen: Sequence[Candidate],
    pool: Executor,
) -> list[Candidate]:
    """Those that hold the rate, with as many workers as it needs; what would need more than there are falls out."""
    done: list[Candidate] = []
    open_ones = list(chosen)
    assert question.rate_per_s is not None
    for _ in range(_MOST_GROWN):
        trials = [layout_trial(question, known, one.layout) for one in open_ones]
        rates = [question.rate_per_s / one.layout.num_units for one in open_ones]
        found = list(zip(open_ones, pool.map(lateness_at, trials, rates), strict=True))
        done += [one for one, late in found if late is None]
        larger = [_larger(question, halves, one, late) for one, late in found if late is not None]
        open_ones = [one for one in larger if one is not None]
    return done


def _larger(
    question: Question, halves: Mapping[Role, Sequence[Half]], one: Candidate, late: Lateness
) -> Candidate | None:
    """One unit more, or one worker more of the half that is late more often; None: it does not fit.

    Where its kind of GPU is used up, the worker is of another kind.
    """
    layout, fleet = one.layout, question.fleet
    if layout.is_paired and layout.num_units > 1:
        made = one.larger(layout.sets, layout.num_units + 1)
        return made if made.layout.fits(fleet) else None
    half: Role = "prefill" if late.first > late.later else "decode"
    short: Role = "both" if layout.is_colocated else half
    kinds = [each.kind for each in layout.sets if each.role == short]
    if not layout.is_paired:
        kinds += [half.option.kind for half in halves[short] if half.option.kind not in kinds]
    made_ones = (one.larger(_with_another(layout.sets, short, kind), layout.num_units) for kind in kinds)
    return next((made for made in made_ones if made.layout.fits(fleet)), None)


def _with_another(sets: tuple[WorkerSet, ...], role: Role, kind: WorkerKind) -> tuple[WorkerSet, ...]:
    if any((one.role, one.kind) == (role, kind) for one in sets):
        return tuple(
            one._replace(num=_more(one.num) if (one.role, one.kind) == (role, kind) else one.num) for one in sets
        )
    last = max(at for at, one in enumerate(sets) if one.role == role)
    return (*sets[: last + 1], WorkerSet(role, kind, 1), *sets[last + 1 :])


def _more(num: int) -> int:
    """One more, or a twentieth of many."""
    return num + max(num // 20, 1)
