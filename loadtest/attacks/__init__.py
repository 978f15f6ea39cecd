"""Attacks: few clients that send valid but expensive requests, and what the other clients notice of it.

Each module has one attack (`harness.Attack`); `__main__` lists them. `harness` starts a server with two tenants, sends
the requests of a normal client without and with the attack, and reads the memory of the gateway process. Linux only.
"""
