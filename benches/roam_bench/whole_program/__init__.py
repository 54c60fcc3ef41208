"""The whole graph as one integer program, after MODeL: planning by a solver alone, for comparison.

The programs are those of Steiner et al., "MODeL: Memory Optimizations for Deep Learning" (ICML
2023; as OLLA, arXiv 2210.12924; code facebookresearch/MODel_opt): first when every operator runs,
then where every tensor lies. Nothing of roam's planner is used.

Let C(i, t) and P(i, t), 0 or 1, say that tensor i is created, or preserved, at time step t, and
s(i) be its bytes. The first program is to minimize peak, where for every i, t and operator v

    sum over i of s(i) (C(i, t) + P(i, t)) <= peak
    C(i, t) + P(i, t) <= 1,    sum over t of C(i, t) = 1,    P(i, t) <= P(i, t-1) + C(i, t-1)
    C(o, t) = C(o', t)         for outputs o, o' of v
    C(o, t) <= P(i, t)         for an output o and an input i of v

Constraints without a tensor are tensors of size 0 that are preserved. With one stream there are as
many steps as operators. With several, any number of operators may run at one step, with all that
they touch live together, in ceil(1.01 L) steps, where the longest chain has L operators.

The program as solved here has the same schedules as solutions: all outputs of v share one create
variable, done(v, t) is its running sum, and held(i, t) takes the place of C(i, t) + P(i, t), with
the rows of the program for windows (rust/roam-core/src/order/programs/integer.rs). For every
constraint that u runs before v there is the row done(v, t) <= done(u, t-1), which the relaxation of
the published rows does not imply. Workspace counts while its operator runs; tensors that enter are
created before the first step, and those that leave are preserved to the last.

The second program takes the lifetimes of that order. Let M be the pool of the start. For each two
tensors i and j whose lifetimes overlap

    A(i) + s(i) <= A(j) + M (1 - below(i, j)),    A(j) + s(j) <= A(i) + M below(i, j)

and the pool, at least A(i) + s(i) for each i, is minimized. From an answer only the operators'
steps, or which tensor lies below which, are taken; peak and pool are recomputed. A bound is the
solver's claim, in floating point.
"""

from roam_bench.whole_program.baseline import Solution, WholeProgram, whole_program

__all__ = ["Solution", "WholeProgram", "whole_program"]
