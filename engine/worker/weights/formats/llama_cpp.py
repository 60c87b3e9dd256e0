"""The layouts of llama.cpp's formats that the CPU computes in as they are.

Q4_0 is `int4`: the same numbers. In K formats the 6-bit factors of groups become 8 bits, so a
weight of Q4_K has 4.63 bits instead of 4.5.
"""

from engine.worker.weights.formats.grouped import GroupLayout
from engine.worker.weights.formats.int4 import SYMMETRIC

Q4_0 = SYMMETRIC[32]
Q4_1 = GroupLayout("q4_1", 32, 4, 0, has_minimums=True)
Q5_0 = GroupLayout("q5_0", 32, 5, 16)
Q5_1 = GroupLayout("q5_1", 32, 5, 0, has_minimums=True)
Q8_0 = GroupLayout("q8_0", 32, 8, 128)
Q4_K = GroupLayout("q4_k", 32, 4, 0, groups=8, has_minimums=True)
Q5_K = GroupLayout("q5_k", 32, 5, 0, groups=8, has_minimums=True)
Q6_K = GroupLayout("q6_k", 16, 6, 32, groups=16)
LAYOUTS = (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K)
