from gateway.access.networks import network_of


def test_addresses_of_one_ipv6_network_are_one_client() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::2:1") == "2001:db8::"
    assert network_of("fe80::1%eth0") == "fe80::"
    assert network_of("::ffff:10.0.0.1") != network_of("::ffff:10.0.0.2")
    assert network_of("10.0.0.1") == "10.0.0.1"
    assert network_of("no:address") == "no:address"
