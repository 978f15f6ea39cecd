"""Values published in the vLLM paper (arXiv 2309.06180), by figure. Ranges are (lowest, highest)."""

from __future__ import annotations

SYSTEMS = ("max", "pow2", "oracle", "pages")
NAMES = {"max": "Orca (Max)", "pow2": "Orca (Pow2)", "oracle": "Orca (Oracle)", "pages": "paged"}

# Figure 2: percent of the KV slots with token states, reserved, internal fragmentation, external and others
FIG2 = {
    "max": (20.4, 13.3, 57.3, 8.9),
    "pow2": (26.8, 17.9, 13.6, 41.6),
    "oracle": (38.2, 25.2, 0.0, 36.6),
    "pages": (96.3, 0.0, 3.7, 0.0),
}
FIG2_PARTS = ("token states", "reserved", "internal fragmentation", "external and others")

# Figure 13: requests in the batch
FIG13_SHAREGPT = {"max": 7.00, "pow2": 9.81, "oracle": 13.62, "pages": 30.42}
FIG13_ALPACA = {"max": 7.00, "pow2": 43.24, "oracle": 72.75, "pages": 132.44}

# Section 6.2, Figure 12 (ShareGPT, three models): how many times higher the sustained rate of pages is
FIG12_OVER_ORACLE = (1.7, 2.7)
FIG12_OVER_MAX = (2.7, 8.0)
FIG12_OVER_STATIC = 22.0  # "up to", over FasterTransformer

# Section 6.3, Figure 14 (OPT-13B, Alpaca): pages over Orca (Oracle)
FIG14_OVER_ORACLE = {"basic": 1.3, "beam 6": 2.3}

# Figure 15: percent of the KV blocks saved by sharing, by number of sequences
FIG15_PARALLEL_ALPACA = {2: 6.09, 4: 8.53, 6: 9.79}
FIG15_BEAM_ALPACA = {2: 37.56, 4: 53.13, 6: 55.16}
FIG15_PARALLEL_SHAREGPT = (16.2, 30.5)
FIG15_BEAM_SHAREGPT = (44.3, 66.3)

# Section 6.4, Figure 16 (LLaMA-13B, WMT16): prefix tokens -> throughput over Orca (Oracle)
FIG16 = {80: 1.67, 341: 3.58}

FIG17_OVER_ORCA = 2.0  # section 6.5, Figure 17: chatbot, over all three Orca systems

# Section 7.1, Figure 18a: attention latency of vLLM's kernel over that of FasterTransformer, "20-26% higher"
FIG18A = (1.20, 1.26)
