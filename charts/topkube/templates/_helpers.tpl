{{- /* Services must have names that begin with a letter and contain no dots; the names of releases need not. */ -}}
{{- define "topkube.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- $full = default $full .Values.fullnameOverride | replace "." "-" -}}
{{- if not (regexMatch "^[a-z]" $full) -}}
{{- $full = printf "topkube-%s" $full -}}
{{- end -}}
{{- $full | trunc 39 | trimSuffix "-" -}}
{{- end -}}

{{- define "topkube.operator" -}}
{{ include "topkube.fullname" . }}-operator
{{- end -}}

{{- define "topkube.serviceAccount" -}}
{{- default (include "topkube.operator" .) .Values.serviceAccount.name -}}
{{- end -}}

{{- /* The NetworkPolicies of jobs select operator pods by name and component. These two labels must never change. */ -}}
{{- define "topkube.selectorLabels" -}}
app.kubernetes.io/name: topkube
app.kubernetes.io/component: operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "topkube.labels" -}}
{{ include "topkube.selectorLabels" . }}
app.kubernetes.io/part-of: topkube
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "topkube.image" -}}
{{ .Values.image.repository }}
{{- if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ default .Chart.AppVersion .Values.image.tag }}{{ end }}
{{- end -}}

{{- define "topkube.kubeVersion" -}}
{{- default .Capabilities.KubeVersion.Version .Values.kubeVersionOverride -}}
{{- end -}}

{{- define "topkube.atLeast" -}}
{{- semverCompare (printf ">=%s-0" .version) (include "topkube.kubeVersion" .root) -}}
{{- end -}}

{{- /* Return "true" if an object of the Prometheus operator is to be created, otherwise "false". auto asks the cluster. */ -}}
{{- define "topkube.monitoring" -}}
{{- if eq (toString .enabled) "auto" -}}
{{- .root.Capabilities.APIVersions.Has (printf "monitoring.coreos.com/v1/%s" .kind) -}}
{{- else -}}
{{- .enabled -}}
{{- end -}}
{{- end -}}

{{- define "topkube.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "topkube.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- /* How a monitor reaches a metrics port: TLS, and the token that the port asks for. */ -}}
{{- define "topkube.scrape" -}}
{{- $protection := .Values.metrics.protection -}}
{{- if $protection.tls -}}
scheme: https
tlsConfig:
  {{- if $protection.scrapeTlsConfig }}
  {{- toYaml $protection.scrapeTlsConfig | nindent 2 }}
  {{- else }}
  insecureSkipVerify: true
  {{- end }}
{{- if eq $protection.authentication "kubernetes" }}
{{- with $protection.scrapeAuthorization }}
authorization: {{- toYaml . | nindent 2 }}
{{- else }}
bearerTokenFile: /var/run/secrets/kubernetes.io/serviceaccount/token
{{- end }}
{{- end }}
{{- end -}}
{{- end -}}

{{- /* The arguments by which a metrics port is protected. */ -}}
{{- define "topkube.protectionArgs" -}}
{{- $protection := .Values.metrics.protection -}}
{{- if $protection.tls }}
{{- if $protection.secretName }}
- --metrics-certificate=/etc/topkube/metrics
{{- else }}
- --metrics-tls
{{- end }}
{{- if ne $protection.authentication "none" }}
- --metrics-authentication={{ $protection.authentication }}
{{- end }}
{{- end }}
{{- end -}}
