"""A real Kubernetes on one Debian machine: for the tests, and for users who want to try TopKube on a cluster.

etcd, kube-apiserver, controller manager and scheduler run on the machine itself; every node is a network namespace, a
mount namespace and a cgroup of its own with containerd, kubelet and kube-proxy in it. Kubernetes is compiled from
Debian's source package, the rest are Debian's packages; no registry and no container engine is needed. Root is.

    layout.py          names, addresses and folders of a cluster; several clusters fit on one machine
    cgroups.py         a group of processes is a cgroup: started in it, found by it, killed by it
    daemons.py         a long-running program in a cgroup, with a log
    apt_sources.py     where this machine takes Debian's packages from
    packages.py        Debian's packages, and the compiled Kubernetes
    certificates.py    the cluster's authority, certificates and kubeconfigs
    control_plane.py   etcd and the three control plane programs
    node.py            a node: its namespaces, containerd, kubelet, kube-proxy; how it vanishes and comes back
    network.py         the bridge between nodes: shaping links, cutting them
    images.py          TopKube's images, built with buildah, kept unpacked, put on nodes
    cluster.py         all of it together
    __main__.py        python -m localkube up | down | images | shape | ...

A cluster that is started first removes whatever is left of an earlier one of the same number. It touches only what is
provably its own: processes in its cgroup, the bridge of its name, its state folder.
"""
