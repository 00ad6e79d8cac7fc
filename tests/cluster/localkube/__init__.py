"""A real Kubernetes on one Debian machine: for the tests, and for users who want to try TopKube on a cluster.

etcd, kube-apiserver, controller manager and scheduler run on the machine itself. Each node is a network namespace, a
mount namespace and a cgroup, in which containerd, kubelet and kube-proxy run. Kubernetes is compiled from Debian's
source package; the other programs are Debian's packages. This needs root, but no registry and no container engine.

    layout.py          names, addresses and folders of a cluster; several clusters fit on one machine
    cgroups.py         a group of processes in a cgroup, which starts, lists and kills them
    daemons.py         a long-running program in a cgroup, with a log
    apt_sources.py     the package sources of this machine
    packages.py        Debian's packages, and the compiled Kubernetes
    certificates.py    the cluster's authority, certificates and kubeconfigs
    control_plane.py   etcd and the three control plane programs
    node.py            a node: its namespaces, containerd, kubelet, kube-proxy; a power failure, and the boot after it
    network.py         the bridge between nodes; links that are shaped or cut
    images.py          TopKube's images, built with buildah, kept unpacked, copied to nodes
    cluster.py         the whole cluster
    __main__.py        python -m localkube up | down | images | shape | ...

The start of a cluster first removes what is left of an earlier cluster of the same number: the processes in its cgroup,
the bridge of its name, and its state folder. It removes nothing else.
"""
