"""The run stage: `ParallelModule` on real ranks, and all ranks of a program in lockstep in one process."""
