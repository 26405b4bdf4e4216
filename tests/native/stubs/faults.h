// Fault injection: the n-th counted allocation fails.
#pragma once

// state of fault injection; failing.h defines the operators that use it
struct fault_counts {
    long at     = -1; // index of the allocation that fails; -1: none
    long n_seen = 0;  // allocations since arm()
    int  exempt = 0;  // more than 0: allocations of the test itself, which are not counted
    bool armed  = false;
};

inline fault_counts & faults() {
    static fault_counts counts;
    return counts;
}

inline void arm(long at) {
    auto & f = faults();
    f.at     = at;
    f.n_seen = 0;
    f.armed  = true;
}

// returns true if the fault was injected
inline bool disarm() {
    faults().armed = false;
    return faults().at >= 0 && faults().n_seen > faults().at;
}

// counts an allocation; returns true if it must fail
inline bool fault() {
    auto & f = faults();
    return f.armed && f.exempt == 0 && f.n_seen++ == f.at;
}

// allocations within its scope are not counted and do not fail
struct exempt {
    exempt() { faults().exempt++; }
    ~exempt() { faults().exempt--; }
};
