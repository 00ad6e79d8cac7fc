"""The commands that mpiexec prints for its proxies: parsed in the launcher, built again in the workers."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from pydantic import ValidationError

from topkube.errors import LaunchError
from topkube.launch.connection.messages import ProxyParameters
from topkube.launch.mpi import proxies
from topkube.launch.mpi.mpi_library import Mpi

HYDRA_5 = (
    "HYDRA_LAUNCH: /opt/a b/hydra_pmi_proxy --control-port 127.0.0.1:40053 --rmk user --launcher manual --demux poll "
    "--pgid 0 --retries 10 --usize -1 --pmi-port 0 --gpus-per-proc -2 --gpu-subdevs-per-proc -2 --proxy-id 1 "
).replace("a b", "'a b'")
HYDRA_4 = (
    "HYDRA_LAUNCH: /usr/bin/hydra_pmi_proxy --control-port 10.0.0.1:1234 --debug --rmk user --launcher manual --demux "
    "poll --iface eth0 --pgid 0 --retries 10 --usize -2 --proxy-id 0 "
)
PRTED = [
    "10.1.2.3",
    "PRTE_PREFIX=/opt/mpi;export PRTE_PREFIX;LD_LIBRARY_PATH=/opt/mpi/lib:$LD_LIBRARY_PATH;export LD_LIBRARY_PATH;"
    "/opt/mpi/bin/prted",
    *("--daemonize", "--allow-run-as-root", "--prtemca", "ess", '"env"', "--prtemca", "ess_base_nspace"),
    *('"prterun-vm-6545@0"', "--prtemca", "ess_base_vpid", "2", "--prtemca", "ess_base_num_procs", '"3"'),
    *("--prtemca", "prte_hnp_uri", '"prterun-vm-6545@0.0;tcp://192.0.2.2,10.10.0.1:46039:24,24;tcp6://[fd00::2]:4:64"'),
    *("--prtemca", "plm_ssh_agent", '"/bin/sh /tmp/x/agent"', "--prtemca", "routed_radix", '"4"'),
]
ORTED = [
    "10.1.2.4",
    " /usr/bin/orted",
    *("-mca", "ess", '"env"', "-mca", "ess_base_jobid", '"2876899328"', "-mca", "ess_base_vpid", "1"),
    *("-mca", "ess_base_num_procs", '"3"', "-mca", "orte_node_regex", '"w,[2:10].1.2.4,[2:10].1.2.5@0(3)"'),
    *("-mca", "orte_hnp_uri", '"2876899328.0;tcp://10.1.2.9:35971"', "-mca", "plm_rsh_agent", '"/bin/sh /tmp/x/agent"'),
]


def encode_call(words: list[str]) -> bytes:
    """Return `words` as the agent reports a call: each word ends with a zero byte."""
    return b"".join(word.encode() + b"\0" for word in words)


@pytest.fixture
def mpich(tmp_path: Path) -> Mpi:
    return install_mpi(tmp_path, "MPICH", "5.0.2", "hydra_pmi_proxy")


def install_mpi(directory: Path, name: str, version: str, proxy: str) -> Mpi:
    """Put an empty program `proxy` into `directory`, beside an mpiexec. Return this MPI library."""
    program = directory / proxy
    program.touch()
    program.chmod(0o755)
    return Mpi(name, version, directory / "mpiexec")


def test_a_hydra_proxy_goes_through_the_tunnel(mpich: Mpi) -> None:
    number, port, parameters = proxies.parse_hydra_parameters(HYDRA_5)
    assert (number, port) == (1, 40053)
    command = proxies.build_proxy_command(parameters, mpich, 777)
    options_of_mpiexec = shlex.split(HYDRA_5.removeprefix("HYDRA_LAUNCH: "))
    assert command[0] == str(mpich.mpiexec.parent / "hydra_pmi_proxy"), "the worker's own program"
    assert command[1:3] == ["--control-port", "127.0.0.1:777"], "the worker's own end"
    assert command[3:] == options_of_mpiexec[3:], "the rest as mpiexec asked for it"


def test_options_of_an_older_hydra_are_parsed(mpich: Mpi) -> None:
    number, port, parameters = proxies.parse_hydra_parameters(HYDRA_4)
    assert (number, port) == (0, 1234)
    command = proxies.build_proxy_command(parameters, mpich, 7)
    assert "--debug" in command
    assert command[command.index("--debug") + 1] == "--rmk"


def test_prted_goes_through_the_tunnel(tmp_path: Path) -> None:
    number, port, parameters = proxies.parse_agent_parameters(encode_call(PRTED))
    assert (number, port) == (1, 46039), "daemon 0 is mpiexec itself"
    command = proxies.build_proxy_command(parameters, install_mpi(tmp_path, "OpenMPI", "5.0.11", "prted"), 777)
    text = " ".join(command)
    assert "--prtemca prte_hnp_uri prterun-vm-6545@0.0;tcp://127.0.0.1:777:8" in text
    assert "--prtemca ess_base_vpid 2" in text
    assert "--prtemca routed_radix 4" in text
    assert "agent" not in text
    assert "192.0.2.2" not in text
    assert "--daemonize" not in command


def test_orted_of_open_mpi_4_goes_through_the_tunnel(tmp_path: Path) -> None:
    number, port, parameters = proxies.parse_agent_parameters(encode_call(ORTED))
    assert (number, port) == (0, 35971)
    command = proxies.build_proxy_command(parameters, install_mpi(tmp_path, "OpenMPI", "4.1.4", "orted"), 777)
    text = " ".join(command)
    assert "--mca orte_hnp_uri 2876899328.0;tcp://127.0.0.1:777" in text
    assert "10.1.2.9" not in text
    assert "--mca orte_node_regex w,[2:10].1.2.4,[2:10].1.2.5@0(3)" in text


def test_the_options_of_mpiexec_have_other_names_in_open_mpi_4_than_in_5() -> None:
    for version, words in [
        (
            "5.0.11",
            [
                "--prtemca plm_ssh_agent",
                "--prtemca plm_ssh_no_tree_spawn 1",
                "--prtemca plm_ssh_num_concurrent 3",
                "--prtemca routed_radix 3",
                "--prtemca prte_do_not_resolve 1",
                "--map-by :OVERSUBSCRIBE",
            ],
        ),
        (
            "4.1.4",
            [
                "--mca plm_rsh_agent",
                "--mca plm_rsh_no_tree_spawn 1",
                "--mca plm_rsh_num_concurrent 3",
                "--mca routed_radix 3",
                "--mca opal_if_do_not_resolve 1",
                "--oversubscribe",
            ],
        ),
    ]:
        mpi = Mpi("OpenMPI", version, Path("/x/mpiexec"))
        text = " ".join(proxies.build_mpiexec_command(mpi, Path("/t/hosts"), 2, 4, Path("/t/agent"), ["prog"]))
        assert "--hostfile /t/hosts" in text
        assert "-n 8 prog" in text
        for word in words:
            assert word in text


@pytest.mark.parametrize(
    "line",
    [
        HYDRA_5.replace("--rmk user", "--exec rm"),
        HYDRA_5.replace("--control-port 127.0.0.1:40053", ""),
        HYDRA_5.replace("--proxy-id 1", "--proxy-id x"),
        "HYDRA_LAUNCH: ",
    ],
)
def test_unknown_options_of_hydra_are_refused(line: str) -> None:
    with pytest.raises(LaunchError, match="TopKube does not support"):
        proxies.parse_hydra_parameters(line)


def test_unknown_calls_of_the_agent_are_refused() -> None:
    for words in ([], ["host"], ["host", "rm", "-rf"], [*PRTED, "--stray"], ["host", "/bin/prted", "--prtemca", "a"]):
        with pytest.raises(LaunchError, match="TopKube does not support"):
            proxies.parse_agent_parameters(encode_call(words))


def test_a_worker_starts_nothing_but_its_proxy(mpich: Mpi, tmp_path: Path) -> None:
    hostile = ProxyParameters(mpi="MPICH", options=(("control-port", "10.0.0.9:1"),))
    with pytest.raises(LaunchError, match="TopKube does not support"):
        proxies.build_proxy_command(hostile, mpich, 7)
    with pytest.raises(LaunchError, match="the launcher uses OpenMPI, this worker's image has MPICH"):
        proxies.build_proxy_command(ProxyParameters(mpi="OpenMPI"), mpich, 7)
    for name in ("--rmk", "a b", "", "x;y"):
        with pytest.raises(ValidationError):
            ProxyParameters(mpi="MPICH", options=((name, "v"),))
    with pytest.raises(ValidationError):
        ProxyParameters(mpi="MPICH", options=(("rmk", "a\nb"),))
    with pytest.raises(LaunchError, match="there is no prted or orted in the folder of"):
        proxies.build_proxy_command(
            ProxyParameters(mpi="OpenMPI"), Mpi("OpenMPI", "5.0", tmp_path / "none" / "mpiexec"), 7
        )


def test_hosts_are_listed_in_worker_order(mpich: Mpi) -> None:
    hosts = ["10.0.0.7", "10.0.0.2"]
    assert proxies.build_host_list(mpich, hosts, 2) == "10.0.0.7:2\n10.0.0.2:2\n"
    open_mpi = Mpi("OpenMPI", "5.0.11", Path("/x/mpiexec"))
    assert proxies.build_host_list(open_mpi, hosts, 2) == "10.0.0.7 slots=2\n10.0.0.2 slots=2\n"
    command = proxies.build_mpiexec_command(mpich, Path("/t/hosts"), 2, 2, Path("/t/agent"), ["python", "-m", "x"])
    assert command[command.index("-f") + 1] == "/t/hosts"
    assert "-genvnone" in command
    assert command[-5:] == ["-n", "4", "python", "-m", "x"]
