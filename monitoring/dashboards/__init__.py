"""The dashboards, one module each."""

from __future__ import annotations

from monitoring.dashboards.cache import CACHE
from monitoring.dashboards.cluster import CLUSTER
from monitoring.dashboards.communication import COMMUNICATION
from monitoring.dashboards.job import JOB
from monitoring.dashboards.operator import OPERATOR
from monitoring.grafana import Dashboard

DASHBOARDS: tuple[Dashboard, ...] = (CLUSTER, JOB, COMMUNICATION, CACHE, OPERATOR)
