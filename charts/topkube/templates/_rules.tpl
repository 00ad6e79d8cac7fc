{{- /* What the operator may do in the namespaces that it looks after. docs/threat-model.md says what each right is for. */ -}}
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
  verbs: [get, list, watch, create, delete]
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
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
{{- end -}}

{{- /* What it needs of the cluster itself. */ -}}
{{- define "topkube.clusterRules" -}}
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  verbs: [list, watch]
{{- if and .Values.webhook.enabled (not .Values.webhook.certManager.enabled) }}
- apiGroups: [admissionregistration.k8s.io]
  resources: [validatingwebhookconfigurations]
  resourceNames: [{{ .Values.webhook.name | quote }}]
  verbs: [get, update]
{{- end }}
{{- end -}}
