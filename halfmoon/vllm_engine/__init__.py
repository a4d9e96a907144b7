"""vLLM as the engine of a worker: its `AsyncLLM` behind our `ServingEngine`, its paged KV in our canonical order.

vLLM computes in processes of its own. `VllmEngine` is in the worker's process, where frames, codecs and hand-overs
are; our connector is in vLLM's, in two halves: one beside its scheduler, one in each process that computes.

    worker process                                            vLLM's processes
    VllmEngine -- AsyncLLM.generate(kv_transfer_params) --->  scheduler half: which tokens of which request to copy
      KVArena  <=========== one memfd, mapped twice ==========>  computing half: paged cache <-> canonical order
      Listener <-------------- a Unix socket -----------------  "layers 0-5 of 300 tokens are written", "ended", ...

- *Bytes* are in one arena of host memory in canonical order, shared by a memfd. Nothing is serialized, nobody waits
  for the other: a layer is copied once on the engine's side, and once into the frame, which may compress it. On a GPU
  the same mapping is what would be pinned.
- *Orders* travel with the request itself (`kv_transfer_params`), so they come in order with it and end with it.
- *News* come over one socket for each half, so that a report costs vLLM a `send`, and waiting costs nothing.
- *An answer* that has ended stays in vLLM's pages until the worker has found room and the connector has copied its
  whole blocks, so that a store finds them; vLLM makes empty steps meanwhile. Prompts that nobody waits for are copied
  after their first token.
- *A prefill* copies each layer from `save_kv_layer`, the locally cached part with its first chunk. vLLM frees its own
  blocks as soon as the token is there: what is still to be sent lies in the arena. Blocks of the arena are free again
  once the connector has said that the request has ended there, after which no step touches them.
- *A decode* begins once all KV is in the arena; the connector loads it before the first step. Blocks carry the number
  of their use: a load that finds another number is reported to vLLM, which computes the prompt anew.
- *Known prefixes* are loaded into the arena before vLLM gets the request. The arena keeps whole blocks of the last
  prompts by their keys, for stores and other workers, until their room is needed.
- *Sampling* is vLLM's where it has the same parameter; otherwise our own sampler draws the token inside vLLM, as a
  logits processor (structured output; penalties behind a hand-over).
- *Layouts* are not assumed but measured: at start the engine's own cache write is given known bits, which shows where
  each value lies. A cache that is not a permutation of canonical values (quantised, latent) is refused.

Read in this order: messages, reports, staging; of `frontend`, vLLM as seen from the worker: versions, engine_arguments,
sampling, token_source, async_llm, block_events, event_reader; of `connector`, what runs inside vLLM: paged_layer,
scheduling_half, computing_half, connector, own_sampling; of `requests`: shared_blocks, prefix_loading, kept_answers,
present_requests, staged_kv, step_results, generation, report_handler, vllm_engine; then host.
"""
