"""Launchers that start workers elsewhere than on this machine, and stores of KV that servers share.

`KV_STORES` has the stores by the scheme of `--kv-store`, loaded by name.
"""

KV_STORES: dict[str, str] = {"mooncake": "adapters.cluster.mooncake:MooncakeStore"}
