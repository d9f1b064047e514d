"""The price stage: what a rewritten program costs on a cluster, in time and memory.

`simulate.simulate` takes a `LocalProgram` and a `Cluster` and returns a `Simulation`.  Below it:

* `ops`: FLOPs and bytes of one ATen node, and its time;
* `efficiency`: what matmuls and attention reach of the device's rate, by shape, fitted to published measurements;
* `fusion`: what pointwise ops move and store when a compiler makes kernels of chains;
* `collectives`: NCCL's algorithms and protocols, of which the fastest is taken, or one ring under gloo;
* `layout`: strides of local values, and so where a reshape copies;
* `liveness` and `memory`: when each allocation lives, the peak over forward, backward and optimizer step with what is
  live then by module, the reserve;
* `workspaces` and `convolutions`: what ops take for themselves while they run;
* `optimizers`: state per parameter and temporaries of the step, from a table or measured with `allocations`;
* `deferral`: the collectives that one of several micro-steps does for all;
* `simulate`: a host that launches, one compute stream, one stream per link; a collective blocks nothing but its
  `wait_tensor`, and slows what computes beside it;
* `symbolic`: the same counts as SymPy expressions, by names of sizes (`sizes`) and exact sums (`products`).

Devices and NCCL's figures are tables with sources: `gpus.csv` and `nccl.csv`.

Every figure is taken from the graph that will run, so that a plan pays for each collective that is in it, as often as
it is in it, and for each value that is alive, however it came to be.  Predictions beside published training
runs are in `docs/accuracy.md`.  All candidates are priced on the same terms:
the order of two candidates deserves more trust than either's seconds.

What the model does not know, and where that makes it wrong:

* Only matmuls and fused attention have an efficiency by shape; convolutions run at the sustained rate, all other ops
  at the sustained memory bandwidth.  On a CPU nothing depends on the shape.  Attention on H100 is FlashAttention-2's;
  for other versions see `efficiency.with_flash_attention`.  Shares of cards that nobody measured are assumptions, and
  say so in the table.
* A card at its power limit is slower than the same card in a short benchmark; the sustained rates are for training.
* Messages under 16 MiB are off by a quarter in the median, since published runs differ by 30 µs among themselves;
  larger ones by 2% inside a node and 10 to 20% across nodes.  Networks with latencies of a hundred microseconds and
  more (Ethernet of some clouds) are not known: messages under 100 MB are too fast there.
* Links are those that a device usually comes with unless the cluster's description gives the network's rate; other jobs
  on the network are unknown.
* Contention between computing and communicating is one figure a backend.
* The optimizer's step is one fused kernel's traffic.
* Memory that ops take for themselves is exact on a CPU for most ops and an upper bound for convolutions; on a GPU,
  copies of operands that kernels want dense are known, and the share of the reserve that stands for fragmentation
  has to cover what cuDNN and cuBLAS take.  On a CPU the interpreter's and the libraries' own memory is not counted.
* Gradients are freed before each forward pass; outputs that the caller still holds from the step before are not seen.
  Saved values end at their last use in the backward pass, which holds for a runtime that drops them there.
"""
