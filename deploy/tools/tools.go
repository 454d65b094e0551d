//go:build tools

// Package tools pins the tools of `make check-deploy`, and the module with the resource definitions of the Prometheus operator.
package tools

import _ "github.com/prometheus-operator/prometheus-operator/pkg/versionutil"
