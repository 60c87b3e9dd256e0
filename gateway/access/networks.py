"""The client that a network address belongs to, for bounds and debts."""

import socket

# An address's bytes that name a client, who has as many addresses as the others allow
IPV6_NETWORK_BYTES = 8
IPV4_IN_IPV6 = "::ffff:"


def network_of(address: str) -> str:
    """An IPv4 address, or the network of an IPv6 one."""
    if ":" not in address or address.lower().startswith(IPV4_IN_IPV6):
        return address
    try:
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    except OSError:  # a proxy's header may hold anything
        return address
    network = packed[:IPV6_NETWORK_BYTES] + bytes(len(packed) - IPV6_NETWORK_BYTES)
    return socket.inet_ntop(socket.AF_INET6, network)
