"""Who runs this step: a queue of requests, their branches, a token budget, and pages that may run out.

Why one subtraction is enough: a branch has tokens, and some of them are computed. Each step grants a branch part of the
difference. A prompt computed in chunks, a prefix found in the cache, a preempted request that starts over and a branch
that decodes one token are all the same case.

    plan.py       what crosses to the runner: one step as frozen data, and its result
    request.py    a request while it lives, and its branches
    branches.py   fork, extend, retire, part, rejoin: pages and slots follow
    slots.py      the page-table rows of the runner
    limits.py     what can ever fit: the worst case in pages
    steady.py     the branches of which nothing has to be decided, as arrays; the rest is served branch by branch
    batch.py      collects the granted rows of one step and turns them into a plan
    grants.py     how a step's budget is split over a request's branches
    draws.py      what to draw, as arrays
    ahead.py      the step that is planned while the one before it is on the device
    queue.py      admission: who may start, who waits for a twin
    fairness.py   whose turn it is between namespaces
    meter.py      what each of them was served
    forks.py      starting on what a running request has computed
    cost.py       swap or recompute: what is cheaper here
    swap.py       what preempted requests keep in host memory
    audit.py      the proof that tables know their branches' tokens
    scheduler.py  the loop's two halves: plan() before the runner, commit() and apply() after it

What a step costs: for each steady branch a few cells of a few arrays; 1 to 2 us for each page that is full, for its
name and its place in the index; 3 to 5 us for each branch that is served by itself, plus what its strategy takes to say
what to draw. Between steps everything falls out of the processor's caches, numpy's code included: the first call of a
numpy function then costs more than the array it is given. So `steady` and `batch` use few different ones.
"""
