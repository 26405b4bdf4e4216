# Choose, for each file of shim/alternatives, the first of its sections that compiles against the
# tree's headers.
#
# The compiler is called directly and only checks the file: CMake's try_compile would generate a
# project per candidate. A result is cached under a hash of everything that it depends on: a second
# configure run calls no compiler, and another tree in the same build directory is probed again.

set(PLK_INCLUDES
    "${PLK_LLAMA_SRC}/include" "${PLK_LLAMA_SRC}/ggml/include"
    "${PLK_LLAMA_SRC}/src" "${PLK_LLAMA_SRC}/ggml/src")

# The files of shim/alternatives, and the sections of each, best first. `none` is for trees that no
# other section fits; a release without a section that compiles is an error.
set(PLK_GROUPS
    load context settings memory cells rollback update defrag moving mapping counters
    devices sampler grammar adapters pooling rpc)
set(PLK_load vocab model)
set(PLK_context init new)
set(PLK_settings getter member hidden none)
set(PLK_memory memory self cache)
set(PLK_cells shared rows streams single_rows single unified context split view none)
set(PLK_rollback memory guard patched context split prefix none)
set(PLK_update unified self cache context none)
set(PLK_defrag streams self cache compact none)
set(PLK_moving patched none)
set(PLK_mapping patched none)
set(PLK_counters counters none)
set(PLK_devices registry none)
set(PLK_sampler chain functions none)
set(PLK_grammar parser none)
set(PLK_adapters list each first none)
set(PLK_pooling rank none)
set(PLK_rpc server cached plain field first none)

# Set `out` to the sources, each compiled with its section, and PLK_PROBES to the JSON that
# plk_probes() returns.
function(plk_choose folder out)
    plk_compiler_words(words)
    plk_headers_hash("${folder}" headers)
    set(sources "")
    set(answers "")
    foreach(group ${PLK_GROUPS})
        set(source "${folder}/alternatives/${group}.cpp")
        set(candidates ${PLK_${group}})
        if(group STREQUAL "rpc" AND NOT GGML_RPC)
            set(candidates none)
        endif()
        set(winner "")
        foreach(candidate ${candidates})
            plk_probe("${source}" ${candidate} "${headers}" "${words}" good)
            if(good)
                set(winner ${candidate})
                break()
            endif()
        endforeach()
        if(winner STREQUAL "")
            message(FATAL_ERROR
                "no section of ${source} compiles against this tree, ${PLK_LLAMA_SRC}: the release "
                "needs a new one, named in cmake/probes.cmake. The compiler's words: "
                "${CMAKE_BINARY_DIR}/probes/${group}-*.log")
        endif()
        list(APPEND sources "${source}")
        set_source_files_properties("${source}" PROPERTIES
            COMPILE_DEFINITIONS PLK_USE_${winner})
        if(winner STREQUAL "none")
            list(APPEND answers "\"${group}\": null")
        else()
            list(APPEND answers "\"${group}\": \"${winner}\"")
        endif()
        message(STATUS "shim: ${group}: ${winner}")
    endforeach()
    list(JOIN answers ", " answers)
    file(CONFIGURE OUTPUT "${CMAKE_BINARY_DIR}/plk-capabilities.json"
        CONTENT "{\"groups\": {${answers}}}\n" @ONLY)
    set(PLK_PROBES "{${answers}}" PARENT_SCOPE)
    set(${out} ${sources} PARENT_SCOPE)
endfunction()

# Set `out` to the definitions that name the defects of a tree which no header shows, by the text of
# its sources.
function(plk_markers tree out)
    set(found "")
    # All contexts share this counter of a matrix product between 0.3.6 and b5640 (llama.cpp #14035).
    set(file "${tree}/ggml/src/ggml-cpu/llamafile/sgemm.cpp")
    if(EXISTS "${file}")
        file(STRINGS "${file}" lines REGEX "static std::atomic<int64_t> +current_chunk")
        if(lines)
            list(APPEND found PLK_SHARED_COUNTER)
        endif()
    endif()
    # For a few days in July 2025 (0.3.12), the loop that splits a batch of a recurrent model lacked
    # the end at an empty micro-batch: it never ended and used all memory (llama.cpp #14575).
    set(file "${tree}/src/llama-memory-recurrent.cpp")
    if(EXISTS "${file}")
        file(STRINGS "${file}" loop REGEX "balloc\\.get_n_used\\(\\) < balloc\\.get_n_tokens\\(\\)")
        file(STRINGS "${file}" end REGEX "ubatch\\.n_tokens == 0")
        if(loop AND NOT end)
            list(APPEND found PLK_ENDLESS_SPLIT)
        endif()
    endif()
    set(${out} ${found} PARENT_SCOPE)
endfunction()

# Set `out` to the command that checks a source file without writing output.
function(plk_compiler_words out)
    separate_arguments(flags NATIVE_COMMAND "${CMAKE_CXX_FLAGS}")
    set(words "${CMAKE_CXX_COMPILER}" ${CMAKE_CXX_COMPILER_ARG1} ${flags}
        -std=c++17 -fsyntax-only -w
        "-I${CMAKE_CURRENT_SOURCE_DIR}" "-I${CMAKE_CURRENT_SOURCE_DIR}/shim")
    if(CMAKE_OSX_SYSROOT)
        list(APPEND words -isysroot "${CMAKE_OSX_SYSROOT}")
    endif()
    foreach(folder ${PLK_INCLUDES})
        list(APPEND words "-I${folder}")
    endforeach()
    set(${out} ${words} PARENT_SCOPE)
endfunction()

# Set `out` to a hash of all headers that a candidate may include. The headers are configure
# dependencies: after a patch adds or changes one, ninja configures again.
function(plk_headers_hash folder out)
    set(patterns "${CMAKE_CURRENT_SOURCE_DIR}/plk.h" "${folder}/*.h" "${folder}/*/*.h")
    foreach(include ${PLK_INCLUDES})
        list(APPEND patterns "${include}/*.h")
    endforeach()
    file(GLOB files CONFIGURE_DEPENDS ${patterns})
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${files})
    set(all "")
    foreach(file ${files})
        file(SHA256 "${file}" one)
        string(APPEND all "${one}")
    endforeach()
    string(SHA256 all "${all}")
    set(${out} "${all}" PARENT_SCOPE)
endfunction()

# Set `out` to TRUE if the section `candidate` of `source` compiles, else to FALSE. The messages of
# the compiler are written to probes/GROUP-CANDIDATE.log in the build directory.
function(plk_probe source candidate headers words out)
    cmake_path(GET source STEM group)
    file(SHA256 "${source}" text)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${source}")
    string(SHA256 key "${text} ${headers} ${words} ${CMAKE_CXX_COMPILER_VERSION}")
    set(answer "PLK_PROBE_${group}_${candidate}")
    if(NOT "${${answer}}" MATCHES "^${key} ")
        execute_process(COMMAND ${words} -DPLK_USE_${candidate} "${source}"
            RESULT_VARIABLE code OUTPUT_VARIABLE text ERROR_VARIABLE text)
        file(WRITE "${CMAKE_BINARY_DIR}/probes/${group}-${candidate}.log" "${text}")
        set(${answer} "${key} ${code}" CACHE INTERNAL "Hash and answer of a compile probe")
    endif()
    if("${${answer}}" STREQUAL "${key} 0")
        set(${out} TRUE PARENT_SCOPE)
    else()
        set(${out} FALSE PARENT_SCOPE)
    endif()
endfunction()
