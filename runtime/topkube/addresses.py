"""The IP addresses of this machine, and the network devices that have them."""

from __future__ import annotations

import fcntl
import socket
import struct
from pathlib import Path

from topkube.environment import read_network_devices

_MOST_ADDRESSES = 4
"""The most addresses of a rank that others try."""
_GET_ADDRESS, _GET_FLAGS = 0x8915, 0x8913  # SIOCGIFADDR, SIOCGIFFLAGS
_UP_AND_RUNNING = 0x1 | 0x40


def list_addresses(pod_ip: str = "") -> list[str]:
    """Return the IP addresses of this machine at which other machines may reach it, the most likely first. Those of
    the devices in UCX_NET_DEVICES only, if it names network devices."""
    if pod_ip:
        return [pod_ip]
    by_device = _read_addresses()
    chosen = [name for name in read_network_devices() if name in by_device]
    names = chosen or [name for name in by_device if name != "lo"] or list(by_device)
    addresses = [address for name in names for address in by_device[name]]
    default = _find_default_address()
    return sorted(addresses, key=lambda address: address != default)[:_MOST_ADDRESSES]


def find_device(address: str) -> str:
    """Return the name of the network device of this machine that has the address; "" if there is none."""
    return next((name for name, addresses in _read_addresses().items() if address in addresses), "")


def _read_addresses() -> dict[str, list[str]]:
    """Return the addresses of each network device, IPv4 before IPv6."""
    addresses: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            addresses[name] = []
            request = struct.pack("256s", name.encode()[:15])
            try:
                (flags,) = struct.unpack_from("H", fcntl.ioctl(probe, _GET_FLAGS, request), 16)
                if flags & _UP_AND_RUNNING != _UP_AND_RUNNING:
                    continue
                answer = fcntl.ioctl(probe, _GET_ADDRESS, request)
            except OSError:  # it has none
                continue
            addresses[name].append(socket.inet_ntoa(answer[20:24]))
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        lines = []
    for number, _, _, scope, _, name in map(str.split, lines):
        if scope == "00":  # global
            packed = bytes.fromhex(number)
            addresses.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, packed))
    return {name: found for name, found in addresses.items() if found}


def _find_default_address() -> str:
    """Return the address from which this machine would send to the Internet; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # an address that is reserved for documents
            return str(probe.getsockname()[0])
    except OSError:
        return ""
