"""KV blocks that jobs hold on one simulated worker: their own, those of the prefix cache, and reservations.

Blocks taken by decode steps are counted by the worker until a job leaves with them.
"""

from __future__ import annotations

from collections.abc import Mapping

from halfmoon.kv.kv_policy import most_blocks, num_chosen, num_reusable
from halfmoon.policy.shared_step import ToAdmit
from halfmoon.sim.worker.job import Job
from halfmoon.sim.worker.kept_kv import num_dropped, num_unseen
from halfmoon.sim.worker.kv_memory import KvMemory

_EVERY_BLOCK = 1 << 62
"""Known blocks of a job of which nothing more is to be found."""


class JobBlocks:
    """Owns `num_blocks`, `reserved_blocks`, `held_blocks`, `cached_blocks` and `num_known_blocks` of one worker's jobs.

    Knows nothing of queues, slots and steps: the worker decides which job may hold memory. Under a KV policy prefix
    blocks are as large as blocks. What leaves the window of a sequence that decodes counts as held until it ends.
    """

    __slots__ = ("_block_tokens", "_kv", "_prefix_block_tokens")

    def __init__(self, kv: KvMemory, block_tokens: int) -> None:
        self._kv = kv
        self._block_tokens = block_tokens
        self._prefix_block_tokens = kv.prefix_block_size * block_tokens

    def num_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`."""
        return -(-num_tokens // self._block_tokens)

    def num_held(self, job: Job, num_tokens: int) -> int:
        """Blocks of the job's `num_tokens`, without those that its policy has given back."""
        return self.num_for(num_tokens) - num_unseen(job.policy, num_tokens, self._block_tokens)

    def num_for_prompt(self, job: Job) -> int:
        """Blocks to compute the job's tokens, with those for what its policy will choose."""
        return self.num_for(job.target) + num_chosen(job.policy, job.prompt, self._block_tokens)

    def can_ever_hold(self, job: Job, num_tokens: int) -> bool:
        """Whether a job that may become `num_tokens` long fits while nobody else is here: the engine's rule."""
        return most_blocks(job.policy, job.prompt, num_tokens, self._block_tokens) <= self._kv.num_blocks

    def admit(self, job: Job) -> bool:
        """Takes blocks for all the job's tokens except its cached prefix; False if too few are free."""
        taken = self._take(job, self._num_reusable(job), self.num_for_prompt(job))
        if taken is None:
            return False
        matched, num_blocks = taken
        job.cached_blocks, job.num_known_blocks, job.num_blocks = matched, len(matched), num_blocks
        job.computed = len(matched) * self._prefix_block_tokens
        return True

    def _take(self, job: Job, num_known: int, num_blocks: int) -> tuple[list[int], int] | None:
        """Takes `num_blocks`, sharing cached ones of the first `num_known` tokens; None if too few are free."""
        kv = self._kv
        matched = kv.match(job.prefix_blocks, num_known // self._prefix_block_tokens)
        num_blocks -= len(matched) * kv.prefix_block_size
        if num_blocks > kv.available:
            kv.release(matched)
            return None
        kv.take(num_blocks)
        return matched, num_blocks

    def make_known(self, job: Job, num_computed: int) -> None:
        """Adds full computed prefix blocks to the prefix cache, which owns their memory from now on."""
        full = min(num_computed // self._prefix_block_tokens, len(job.prefix_blocks))
        if full > job.num_known_blocks:
            new = self._kv.insert(job.prefix_blocks[job.num_known_blocks : full])
            job.cached_blocks = job.cached_blocks + new
            job.num_blocks -= len(new) * self._kv.prefix_block_size
            job.num_known_blocks = full

    def drop_unseen(self, job: Job, num_computed: int) -> None:
        """Returns the blocks of a prompt that its policy does not see any more. Once all is computed, those that decode
        steps will need stay.
        """
        if job.policy is None:
            return
        if num_computed == job.target:
            kept, position = self.num_held(job, num_computed), num_computed - 1
        else:
            dropped = num_dropped(job.policy, job.prompt, num_computed, self._block_tokens)
            has_chosen = num_computed >= job.prompt
            kept = (self.num_for(job.target) if has_chosen else self.num_for_prompt(job)) - dropped
            position = num_computed if dropped else 0
        self._release_unseen(job, position)
        own = kept - len(job.cached_blocks) * self._kv.prefix_block_size
        self._kv.give(job.num_blocks - own)
        job.num_blocks = own

    def _release_unseen(self, job: Job, position: int) -> None:
        """Ends a job's use of cached blocks that its policy does not see from `position` on: others may find them."""
        if job.policy is None or not job.cached_blocks:
            return
        unseen = job.policy.unseen(position, self._block_tokens)
        first = 0 if num_chosen(job.policy, job.prompt, self._block_tokens) else unseen.start  # the chosen are copies
        gone = set(job.prefix_blocks[first : unseen.stop] if unseen else ())
        self._kv.release([block for block in job.cached_blocks if block in gone])
        job.cached_blocks = [block for block in job.cached_blocks if block not in gone]

    def release(self, job: Job) -> None:
        """Returns the blocks of a prompt that was computed here."""
        self._kv.give(job.num_blocks)
        self._let_go(job)

    def reserve(self, job: Job) -> bool:
        """Reserves room for KV from another worker, and for the next token; False if too few blocks are free.

        Cached blocks of its prefix stay until it leaves, and are not sent.
        """
        taken = self._take(job, self._num_reservable(job), self.num_held(job, job.target + 1))
        if taken is None:
            return False
        job.held_blocks, job.reserved_blocks = taken
        return True

    def held_tokens(self, job: Job) -> int:
        """Leading tokens whose KV was here when the job reserved."""
        return len(job.held_blocks) * self._prefix_block_tokens

    def num_missing(self, job: Job) -> int:
        """Tokens whose KV a reservation waits for: those that were not here, and that the job's policy keeps."""
        kept = job.target - num_dropped(job.policy, job.prompt, job.target, self._block_tokens) * self._block_tokens
        return kept - self.held_tokens(job)

    def unreserve(self, job: Job) -> None:
        """Returns the blocks of a reservation that is no longer needed."""
        self._kv.give(job.reserved_blocks)
        self._kv.release(job.held_blocks)
        job.reserved_blocks, job.held_blocks = 0, []

    def receive(self, job: Job) -> None:
        """Turns a reservation into the job's own blocks once its KV has arrived, and makes its prefix known."""
        job.num_blocks, job.reserved_blocks = job.reserved_blocks, 0
        job.cached_blocks, job.num_known_blocks, job.held_blocks = job.held_blocks, len(job.held_blocks), []
        if self._has_gap(job):  # no prefix is found with one, nor what is behind it
            job.num_known_blocks = _EVERY_BLOCK
            job.prefix_blocks = job.prefix_blocks[: job.target // self._prefix_block_tokens]
        self.make_known(job, job.target)
        # if the next token needs a block, it is taken with its step
        self._kv.give(self.num_held(job, job.target + 1) - self.num_held(job, job.target))

    def leave(self, job: Job) -> None:
        """Returns the blocks of a job that decoded here: those of all tokens but the newest, which others may find.

        Under a policy also those that left its window, as far as there is room for them.
        """
        left: list[int] = []
        if job.policy is None:
            self.make_known(job, job.join_length - 1)
        elif not job.policy.chooses:
            left = job.prefix_blocks[job.num_known_blocks : (job.join_length - 1) // self._prefix_block_tokens]
        self._kv.give(self.num_own(job))
        self._let_go(job)
        if self._kv.is_cache:
            self._kv.adopt(left)

    def move_out(self, job: Job) -> None:
        """Returns the blocks of a job that goes on later with what it has computed."""
        num_known = job.num_known_blocks
        self.leave(job)
        job.num_known_blocks = num_known

    def move_in(self, job: Job) -> None:
        """Takes blocks for what moved out; there must be enough."""
        self._kv.take(self.num_held(job, job.join_length - 1))

    def num_own(self, job: Job) -> int:
        """Blocks of a job that decodes, or is paused, besides those of the prefix cache."""
        return self.num_held(job, job.join_length - 1) - len(job.cached_blocks) * self._kv.prefix_block_size

    def num_freed(self, job: Job, length: int) -> int:
        """Blocks that nobody else uses, of a job that decodes and has `length` tokens."""
        own = self.num_held(job, length - 1) - len(job.cached_blocks) * self._kv.prefix_block_size
        return own + sum(self._kv.num_users(one) == 1 for one in job.cached_blocks) * self._kv.prefix_block_size

    def num_only(self, uses: Mapping[int, int]) -> int:
        """Blocks of those prefix blocks that have no other users."""
        return sum(self._kv.num_users(one) == num for one, num in uses.items()) * self._kv.prefix_block_size

    def num_shared(self, job: Job, uses: Mapping[int, int]) -> int:
        """Blocks of a job that also have other users than those counted in `uses`."""
        shared = (self._kv.num_users(one) != uses[one] for one in job.cached_blocks)
        return sum(shared) * self._kv.prefix_block_size

    def to_admit(self, job: Job, uses: Mapping[int, int]) -> ToAdmit:
        """What `admit` finds in the cache and takes of it."""
        found = self._kv.found(job.prefix_blocks, self._num_reusable(job) // self._prefix_block_tokens)
        num_blocks = self.num_for_prompt(job) - self._num_staying(found, uses)
        return ToAdmit(len(found) * self._prefix_block_tokens, num_blocks)

    def num_to_reserve(self, job: Job, uses: Mapping[int, int]) -> int:
        """Blocks that `reserve` takes, besides cached ones that stay in use anyway."""
        found = self._kv.found(job.prefix_blocks, self._num_reservable(job) // self._prefix_block_tokens)
        return self.num_held(job, job.target + 1) - self._num_staying(found, uses)

    def _num_staying(self, found: list[int], uses: Mapping[int, int]) -> int:
        """Blocks of the cached prefix blocks that have other users than those counted in `uses`."""
        num_staying = sum((num := self._kv.num_users(one)) > 0 and num != uses.get(one, 0) for one in found)
        return num_staying * self._kv.prefix_block_size

    def _num_reusable(self, job: Job) -> int:
        """Leading tokens whose KV may come from the prefix cache where the job is computed."""
        return num_reusable(job.policy, job.prompt, job.target)

    def _num_reservable(self, job: Job) -> int:
        """The same where it only decodes."""
        return 0 if self._has_gap(job) else job.target

    def _has_gap(self, job: Job) -> bool:
        """Whether the job's policy hands over less than all of its KV."""
        return num_dropped(job.policy, job.prompt, job.target, self._block_tokens) > 0

    def _let_go(self, job: Job) -> None:
        self._kv.release(job.cached_blocks)
        job.num_blocks, job.cached_blocks, job.num_known_blocks = 0, [], 0
