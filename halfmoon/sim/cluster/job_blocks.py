"""What each job holds of one simulated worker's KV memory: pages of its own, units of the prefix cache, a reservation.

Pages that decode steps take beside that are the worker's to count, until a job leaves with them.
"""

from __future__ import annotations

from halfmoon.sim.cluster.job import Job
from halfmoon.sim.cluster.kv_memory import KvMemory


class JobBlocks:
    """Owns `pages`, `reserved`, `cached_units` and `known_units` of the jobs that are with one worker.

    Knows nothing of queues, places and steps: who may hold what is the worker's to say.
    """

    __slots__ = ("_kv", "_page_tokens", "_unit_tokens")

    def __init__(self, kv: KvMemory, page_tokens: int) -> None:
        self._kv = kv
        self._page_tokens = page_tokens
        self._unit_tokens = kv.unit_pages * page_tokens

    def num_for(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self._page_tokens)

    def admit(self, job: Job) -> bool:
        """Pages for all that the job has to compute, less what the prefix cache has; False where there are too few."""
        kv = self._kv
        matched = kv.match(job.units, (job.target - 1) // self._unit_tokens)
        num_pages = self.num_for(job.target) - len(matched) * kv.unit_pages
        if num_pages > kv.available:
            kv.release(matched)
            return False
        kv.take(num_pages)
        job.cached_units, job.known_units, job.pages = matched, len(matched), num_pages
        job.computed = len(matched) * self._unit_tokens
        return True

    def make_known(self, job: Job, num_computed: int) -> None:
        """Computed full units enter the prefix cache; their pages are the cache's from now on."""
        full = min(num_computed // self._unit_tokens, len(job.units))
        if full > job.known_units:
            new = self._kv.insert(job.units[job.known_units : full])
            job.cached_units = job.cached_units + new
            job.pages -= len(new) * self._kv.unit_pages
            job.known_units = full

    def release(self, job: Job) -> None:
        """Gives back what a prompt holds that was computed here."""
        self._kv.give(job.pages)
        self._let_go(job)

    def reserve(self, job: Job, num_pages: int) -> None:
        """Room for KV that comes from another worker; there must be as many pages."""
        self._kv.take(num_pages)
        job.reserved = num_pages

    def unreserve(self, job: Job) -> None:
        """It does not come."""
        self._kv.give(job.reserved)
        job.reserved = 0

    def receive(self, job: Job) -> None:
        """It is here, and what was reserved is the job's."""
        job.pages, job.reserved = job.reserved, 0
        if job.target % self._page_tokens == 0:  # its next token's page is taken with its step
            self._kv.give(1)

    def leave(self, job: Job) -> None:
        """Gives back what a job holds that decoded here: pages for all tokens but the newest."""
        self._kv.give(self.num_for(job.join_length - 1) - len(job.cached_units) * self._kv.unit_pages)
        self._let_go(job)

    def _let_go(self, job: Job) -> None:
        self._kv.release(job.cached_units)
        job.pages, job.cached_units, job.known_units = 0, [], 0
