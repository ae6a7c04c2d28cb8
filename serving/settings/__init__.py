"""Settings of the data plane. Unknown keys are refused; sizes are bytes, times are seconds."""

from serving.settings.answers import AdmissionSettings, CallerSettings, RulesSettings, StreamSettings
from serving.settings.arms import ArmSettings, GhostSettings, KnobSettings, SpaceSettings, WarmupSettings
from serving.settings.base import Endpoint, KeyHash, Name, Port, Seconds, Settings, Share
from serving.settings.gateway import GatewaySettings
from serving.settings.llm_sim import LlmSimSettings
from serving.settings.semantic import GuardSettings, LshSettings, SemanticSettings, VectorSettings
from serving.settings.sides import AuthSettings, UpstreamSettings
from serving.settings.storage import MemorySettings, NeighbourSettings, StorageSettings

__all__ = [
    "AdmissionSettings",
    "ArmSettings",
    "AuthSettings",
    "CallerSettings",
    "Endpoint",
    "GatewaySettings",
    "GhostSettings",
    "GuardSettings",
    "KeyHash",
    "KnobSettings",
    "LlmSimSettings",
    "LshSettings",
    "MemorySettings",
    "Name",
    "NeighbourSettings",
    "Port",
    "RulesSettings",
    "Seconds",
    "SemanticSettings",
    "Settings",
    "Share",
    "SpaceSettings",
    "StorageSettings",
    "StreamSettings",
    "UpstreamSettings",
    "VectorSettings",
    "WarmupSettings",
]
