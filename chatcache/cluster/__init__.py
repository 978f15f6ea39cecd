"""Several gateways and engine workers over one Redis.

`bus` is the transport: streams and leases. `worker_host` connects the engine of a worker to it, and `remote_engine` is
the EngineClient of a gateway for all workers. `placed_requests` sends requests to them, and `takeover` continues those
of a gateway that has ended. `request_router` chooses a worker for each request, by `placement` (what is cached where;
`redis_placement` stores it for all gateways) and `routing` (the cost). These two are pure: no input or output, no
clock, no event loop.
"""
