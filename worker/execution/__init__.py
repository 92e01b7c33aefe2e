"""How batches run on the instances of models.

```text
 weir.worker.batch_dispatch            instance.ModelInstance: one thread for each instance
 (event loop)                     batch_runner.BatchRunner: one batch after another
 ──────────────────────           ─────────────────────────────────────────────────────────────────────
 BatchMessage ──▶ Batch ────────▶ start:  decoding.decode_batch        requests, or errors of single entries
                      │                   sequences                    controls, states, padding
                      │ cancel            invocation.ModelInvoker      calls the backend's Instance with the
                      ▼                                                requests and the batch
                  (any time)      finish: waits for a device, if one works on the batch
                                          response_writer              one message of responses a gateway
                                          Batch.record                 counters
 bus  ◀── BatchUpdate ◀──────────
```

Two types carry a batch through its life:

- `Batch`: the message, and what becomes known of it; any thread may look whether a request was cancelled. It is also the
  `Execution` that a backend gets together with the requests. A model that sends responses itself does so through it, also
  after its `execute` has returned; then the batch is one of the instance's `StreamingBatches`.
- `BatchUpdate`: what leaves the instance: responses, and completions for the scheduler. A batch has one update, or several
  if its model sends responses itself; `HeldUpdates` joins those of batches that ended in one turn.

A `Microbatch` is several batches of one request each on their way through the process of an instance.
"""
