{{- /* The operator's rights in the namespaces that it serves. docs/threat-model.md explains the purpose of each right. */ -}}
{{- define "topkube.jobRules" -}}
- apiGroups: [topkube.dev]
  resources: [trainingjobs]
  verbs: [get, list, watch, delete]
- apiGroups: [topkube.dev]
  resources: [trainingjobs/status]
  verbs: [patch]
- apiGroups: [topkube.dev]
  resources: [trainingjobs/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
- apiGroups: [""]
  resources: [services, secrets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [scheduling.volcano.sh, scheduling.x-k8s.io]
  resources: [podgroups]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch]
- apiGroups: [topkube.dev]
  resources: [cacheddatasets]
  verbs: [list, watch]
{{- end -}}

{{- /* The operator's rights on cluster-scoped objects. */ -}}
{{- define "topkube.clusterRules" -}}
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
- apiGroups: [kueue.x-k8s.io]
  resources: [resourceflavors, workloadpriorityclasses]
  verbs: [get]
- apiGroups: [scheduling.k8s.io]
  resources: [priorityclasses]
  verbs: [get]
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  verbs: [list, watch]
{{- include "topkube.tokenRules" . }}
{{- if and .Values.webhook.enabled (not .Values.webhook.certManager.enabled) }}
- apiGroups: [admissionregistration.k8s.io]
  resources: [validatingwebhookconfigurations]
  resourceNames: [{{ .Values.webhook.name | quote }}]
  verbs: [get, update]
{{- end }}
{{- end -}}

{{- /* Check the tokens of scrapers. */ -}}
{{- define "topkube.tokenRules" -}}
{{- if eq .Values.metrics.protection.authentication "kubernetes" }}
- apiGroups: [authentication.k8s.io]
  resources: [tokenreviews]
  verbs: [create]
- apiGroups: [authorization.k8s.io]
  resources: [subjectaccessreviews]
  verbs: [create]
{{- end }}
{{- end -}}
