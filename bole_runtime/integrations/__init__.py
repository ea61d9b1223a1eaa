"""Bole inside other projects. Each subpackage imports its project when it is used, never before."""
