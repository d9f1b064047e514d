"""The price stage: what a rewritten program costs on a cluster, in time and memory.

`simulate.simulate` takes a `LocalProgram` and a `Cluster` and returns a `Simulation`.  Below it:

* `ops`: FLOPs and bytes of one ATen node, and its roofline time;
* `collectives`: ring formulas with a latency per hop and a bandwidth;
* `layout`: strides of local values, and so where a reshape copies;
* `liveness` and `memory`: when each allocation lives, the peak over forward, backward and optimizer step with what is
  live then by module, the reserve;
* `workspaces` and `convolutions`: what ops take for themselves while they run;
* `optimizers`: state per parameter and temporaries of the step, from a table or measured with `allocations`;
* `simulate`: one compute stream, one stream per link; a collective blocks nothing but its `wait_tensor`.

Every figure is taken from the graph that will run, so that a plan pays for each collective that is in it, as often as
it is in it, and for each value that is alive, however it came to be.  All candidates are priced on the same terms:
the order of two candidates deserves more trust than either's seconds.

What the model does not know, and where that makes it wrong:

* An op runs at the device's sustained rate whatever its shape.  Small or oddly shaped matmuls reach half of that or
  less, and step times published for large training runs are 2 to 3 times a naive roofline on data-sheet peaks.
* Each op is charged its launch even where a busy GPU hides it, and nothing is fused.  Graphs of tiny ops come out too
  slow on a GPU, and programs that Inductor compiles too.
* Collectives are rings.  Above about a hundred ranks NCCL's trees have much lower latency; protocols between the
  smallest and the largest messages are one line here.  Links are those that a device usually comes with unless
  the cluster's description gives the network's rate; other jobs on the network are unknown.
* Computing and communicating at once slow each other down (multiprocessors, memory bandwidth, CPU cores under gloo);
  here they do not.
* Attention pays for the whole score matrix, also where a causal kernel skips half of it.
* The optimizer's step touches parameters, gradients and state once.
* Memory that ops take for themselves is exact on a CPU for most ops and an upper bound for convolutions; on a GPU,
  copies of operands that kernels want dense are known, and the share of the reserve that stands for fragmentation
  has to cover what cuDNN and cuBLAS take.  On a CPU the interpreter's and the libraries' own memory is not counted.
* Gradients are freed before each forward pass; outputs that the caller still holds from the step before are not seen.
  Saved values end at their last use in the backward pass, which holds for a runtime that drops them there.
"""
