"""`chatcache bench`: how fast the engine is, always beside what this machine could do in the same run.

A speed alone says little; a speed over its limit says how much is left. Limits are measured, not read from a data
sheet: read bandwidth over a buffer as large as the weights, matmul rate in the weights' dtype.

    limits.py    measure the machine; the roofline of a step
    shapes.py    random-weight model folders in the shapes people know
    driver.py    step an engine and keep the times
    measures.py  latency, throughput, beam, prefix
    kv.py        pages and scheduler steps alone, beside their goals
    report.py    figures as a table or JSON
"""
