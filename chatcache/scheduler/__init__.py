"""The scheduler: which branches of which requests compute how many tokens in the next step.

Everything follows from one subtraction. A branch has tokens, and some of them are computed; each step grants the branch
a part of the difference. A prompt computed in chunks, a prefix found in the cache, a preempted request that starts
again and a branch that decodes one token are all this same case. A step is planned before the runner executes it and
committed afterwards:

    plan:    start waiting requests --> grant tokens, pages and rows --> StepPlan
    commit:  record the computed tokens --> publish full pages --> apply the actions of the decoding strategies

Branches that decode one token per step, the normal state of a busy server, are kept as arrays in a persistent decode
batch, so that planning their step takes a few array operations. All other branches are handled one by one (3 to 5 us
each). Between two steps the processor's caches are cold, numpy's code included, and the first call of a numpy function
costs more than the array it works on; so `decode_batch` and `batch` use few different numpy functions.

Reading order: `request`, `branches`, `queue`, `speed`, `fairness`, `preemption`, `decode_batch`, `batch`,
`token_budget`, `scheduler`.
"""
