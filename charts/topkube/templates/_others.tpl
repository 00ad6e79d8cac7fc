{{- /* Two operators that reconcile the same jobs would undo each other's work: refuse the second operator, by name. */ -}}
{{- define "topkube.checkOthers" -}}
{{- $mine := .Values.namespaces -}}
{{- range (lookup "apps/v1" "Deployment" "" "").items -}}
{{- $labels := .metadata.labels | default dict -}}
{{- $isOperator := and (eq (get $labels "app.kubernetes.io/name") "topkube") (eq (get $labels "app.kubernetes.io/component") "operator") -}}
{{- $isOwn := and (eq (get $labels "app.kubernetes.io/instance") $.Release.Name) (eq .metadata.namespace $.Release.Namespace) -}}
{{- if and $isOperator (not $isOwn) -}}
{{- $other := printf "%s/%s" .metadata.namespace .metadata.name -}}
{{- $theirs := get (.metadata.annotations | default dict) "topkube.dev/namespaces" | default "*" -}}
{{- if or (eq $theirs "*") (not $mine) -}}
{{- fail (printf "another operator, %s, looks after %s. Likely cause: TopKube is installed already. Next: upgrade that release, or give both different lists with --set namespaces='{...}'" $other (ternary "all namespaces" (printf "namespaces %s" $theirs) (eq $theirs "*"))) -}}
{{- end -}}
{{- range (splitList "," $theirs) -}}
{{- if has . $mine -}}
{{- fail (printf "another operator, %s, looks after namespace %s already. Next: leave it out of `namespaces`, or out of the other release" $other .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Cluster-scoped objects have one name for all releases: name their owner, and the value to set. */ -}}
{{- define "topkube.checkOwners" -}}
{{- $name := include "topkube.operator" . -}}
{{- $roles := ternary $name (printf "%s-cluster" $name) (empty .Values.namespaces) -}}
{{- $objects := list -}}
{{- if .Values.crds.install -}}
{{- range list "trainingjobs.topkube.dev" "cacheddatasets.topkube.dev" -}}
{{- $objects = append $objects (list "apiextensions.k8s.io/v1" "CustomResourceDefinition" . "set crds.install=false to leave it as it is") -}}
{{- end -}}
{{- end -}}
{{- if .Values.rbac.create -}}
{{- $objects = append $objects (list "rbac.authorization.k8s.io/v1" "ClusterRole" $roles "give this release another name, or set fullnameOverride") -}}
{{- end -}}
{{- if .Values.rbac.userRoles -}}
{{- $objects = append $objects (list "rbac.authorization.k8s.io/v1" "ClusterRole" "topkube-view" "set rbac.userRoles=false") -}}
{{- end -}}
{{- if .Values.webhook.enabled -}}
{{- $objects = append $objects (list "admissionregistration.k8s.io/v1" "ValidatingWebhookConfiguration" .Values.webhook.name "set webhook.name to another name") -}}
{{- end -}}
{{- range $objects -}}
{{- $found := lookup (index . 0) (index . 1) "" (index . 2) -}}
{{- if $found -}}
{{- $marks := $found.metadata.annotations | default dict -}}
{{- $release := get $marks "meta.helm.sh/release-name" -}}
{{- $namespace := get $marks "meta.helm.sh/release-namespace" -}}
{{- if not (and (eq $release $.Release.Name) (eq $namespace $.Release.Namespace)) -}}
{{- $owner := ternary (printf "belongs to release %s in namespace %s" $release $namespace) "was not installed by Helm" (ne $release "") -}}
{{- fail (printf "%s %s is there already and %s. Next: %s; docs/install.md tells how to move an installation to Helm" (index . 1) (index . 2) $owner (index . 3)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
