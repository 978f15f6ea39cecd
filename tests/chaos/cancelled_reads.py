"""Check cancelled reads with redis-py alone (goal G13): `python cancelled_reads.py URL NUM SEED` prints the counts.

Many readers share few connections and are cancelled while they wait; later readers must receive their own replies. The
module imports nothing of the project, so that it runs in an environment that contains only an old redis-py.
"""

import asyncio
import json
import random
import sys

import redis
import redis.asyncio

NUM_KEYS, NUM_READERS, NUM_CONNECTIONS = 20, 40, 4


async def main(url: str, num_to_cancel: int, seed: int) -> dict[str, object]:
    pool = redis.asyncio.BlockingConnectionPool.from_url(url, max_connections=NUM_CONNECTIONS, timeout=60)
    client = redis.asyncio.Redis(connection_pool=pool)
    draw = random.Random(seed)
    names = [f"chatcache:cancelling-{number}" for number in range(NUM_KEYS)]
    for name in names:
        await client.set(name, name)
    found = {"cancelled": 0, "right": 0, "wrong": 0, "failed": 0}

    async def read(name: str) -> None:
        try:
            value = await client.get(name)
        except (redis.RedisError, OSError, RuntimeError):
            found["failed"] += 1
        else:
            found["right" if value == name.encode() else "wrong"] += 1

    while found["cancelled"] < num_to_cancel:
        tasks = [asyncio.create_task(read(draw.choice(names))) for _ in range(NUM_READERS)]
        await asyncio.sleep(draw.uniform(0, 0.02))
        for task in draw.sample(tasks, NUM_READERS // 2):
            found["cancelled"] += task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {**found, "version": redis.__version__}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))))
