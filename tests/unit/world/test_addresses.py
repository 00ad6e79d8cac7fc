"""The IP addresses of this machine."""

from __future__ import annotations

import socket

import pytest

from topkube import addresses


def test_the_addresses_of_this_machine() -> None:
    assert addresses.list_addresses("10.1.2.3") == ["10.1.2.3"]
    found = addresses.list_addresses()
    assert found
    for address in found:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))  # it is one of this machine


def test_ucx_net_devices_limits_the_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    assert addresses.list_addresses()[0] == "127.0.0.1"
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")  # no network device of Linux
    assert addresses.list_addresses()


def test_the_device_of_an_address_is_known() -> None:
    assert addresses.find_device("127.0.0.1") == "lo"
    assert addresses.find_device("203.0.113.1") == ""  # an address for documents, which no machine has
