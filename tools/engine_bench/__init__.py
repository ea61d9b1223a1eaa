"""The real SGLang engine under one workload: autoregressive, its own trees and chains, and Bole's plug-in."""
