"""Traces: sampling, spans, trace files, OpenTelemetry export, settings."""
