"""Noise that depends on (seed, lane, position, token id) and on nothing else: not on batch, worker, order or restart.

Definition (all integers unsigned, wrapping; exact on every device, in numpy, torch and Triton alike):

    mix64(x): x ^= x >> 30; x *= 0xBF58476D1CE4E5B9; x ^= x >> 27; x *= 0x94D049BB133111EB; x ^= x >> 31
    mix32(x): x ^= x >> 16; x *= 0x21F0AAAD;         x ^= x >> 15; x *= 0x735A2D97;         x ^= x >> 15

    key   = mix64(mix64(seed + 0x9E3779B97F4A7C15) ^ (lane << 32 | position))          once a draw, 64 bit
    base  = mix32(token_id + 0x9E3779B9)                                               once a vocabulary, 32 bit
    bits  = mix32((base ^ low32(key)) * (high32(key) | 1)) & 0x7FFFFFFF
    v     = min((bits + 0.5) * 2^-31, 1 - 2^-24)                                       float32, uniform in (0, 1)
    noise = -log(-log1p(-v))                                                           standard Gumbel

argmax(logit + noise) draws from softmax(logit). v near 0 is what wins, and there float32 is finest: tokens down to a
probability of about 1e-9 are drawn as often as they should be. The logarithms may differ by an ulp between devices.

Source: the Gumbel-max trick (Gumbel 1954; Maddison et al. 2014); mix64 is the finaliser of SplitMix64 (Steele et al.
2014), mix32 the two-round multiply-xorshift hash of least measured bias (Wellons, hash-prospector).
"""

from __future__ import annotations

import numpy as np
import torch
from chatcache_kernels.cpu import logits
from torch import Tensor

from chatcache.sched.plan import I32, U64

_GOLDEN64 = np.uint64(0x9E3779B97F4A7C15)
_GOLDEN32 = 0x9E3779B9
_LARGEST = 1.0 - 2.0**-24


def draw_keys(seed: U64, lane: I32, position: I32) -> tuple[I32, I32]:
    """Return the two key words of each draw, low and (odd) high. Shapes: all [D]."""
    place = lane.astype(np.uint32).astype(np.uint64) << np.uint64(32) | position.astype(np.uint32).astype(np.uint64)
    with np.errstate(over="ignore"):
        key = _mix64(_mix64(seed.astype(np.uint64) + _GOLDEN64) ^ place)
    low = (key & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    high = (key >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
    return low.view(np.int32), high.view(np.int32)


def token_base(vocab_size: int, device: torch.device) -> Tensor:
    """Return the hashed token ids, int32 [V]; made once, shared by all draws."""
    ids = torch.arange(vocab_size, dtype=torch.int64, device=device) + _GOLDEN32
    return _mix32_(ids.to(torch.int32))


def gumbel(base: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return standard Gumbel noise, float32 [D, K].

    Shapes: base [V], or [D, K] where only some tokens matter; low, high [D] int32 from `draw_keys`.
    """
    if base.device.type == "cpu":
        return logits.gumbel(base, low, high)
    bits = torch.bitwise_xor(base, low[:, None]).mul_(high[:, None])
    uniform = _mix32_(bits).bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=_LARGEST)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix64(x: U64) -> U64:
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def _mix32_(x: Tensor) -> Tensor:
    """Hash int32 in place; int32 multiplication wraps, and a mask makes its arithmetic shift a logical one."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x21F0AAAD)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(0x735A2D97)
    return x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))
