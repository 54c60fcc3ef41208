"""The whole graph as one integer program, after MODeL: planning by a solver alone, for comparison.

The programs are those of Steiner et al., "MODeL: Memory Optimizations for Deep Learning" (ICML
2023; as OLLA, arXiv 2210.12924; code facebookresearch/MODel_opt): first when every operator runs,
then where every tensor lies. docs/explanation/integer-programs.md has both in formulas, and what is
done here to make them stronger. Nothing of roam's planner is used.
"""

from roam_bench.whole_program.baseline import Solution, WholeProgram, whole_program

__all__ = ["Solution", "WholeProgram", "whole_program"]
